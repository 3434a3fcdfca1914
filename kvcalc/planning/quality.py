"""What is known of an attention variant's quality: how diverse its heads are, a published finding, what it trades."""

from typing import NamedTuple


class Quality(NamedTuple):
    """head_diversity: full, grouped or shared keys and values. note: a published finding, with its source. trades: for what."""

    head_diversity: str
    note: str
    trades: str


_V2 = "DeepSeek-V2, arXiv 2405.04434, Table 1"
QUALITY = {
    "mha": Quality("full", f"the reference: 'strong' ({_V2})", "memory"),
    "mqa": Quality(
        "shared", f"'weak' ({_V2}); quality loss and instability (GQA, arXiv 2305.13245, abstract and App. A)", "quality"
    ),
    "gqa": Quality(
        "grouped", "close to MHA after uptraining (GQA, arXiv 2305.13245, abstract); 'moderate' (" + _V2 + ")", "some of both"
    ),
    "mla": Quality("full", f"'stronger' than MHA in its authors' ablations ({_V2}, App. D)", "FLOPs in decode"),
    "dsa": Quality(
        "full", "on par with V3.1-Terminus on public benchmarks (DeepSeek-V3.2-Exp report)", "an indexer, more stored"
    ),
    "window": Quality(
        "as before", "reach grows by layers: W·L tokens (Mistral 7B, arXiv 2310.06825, §2)", "exact recall beyond W"
    ),
    "cla": Quality(
        "as before", "nearly MQA's accuracy at half its cache for 2 layers (arXiv 2405.12981, abstract)", "layer diversity"
    ),
    "evict": Quality(
        "as before", "heavy hitters hold most attention; 20 % kept in its tests (H2O, arXiv 2306.14048)", "evicted tokens"
    ),
}


def quality_of(variant: str) -> dict[str, Quality]:
    """What is known of each step of a variant's name, by step; steps of which nothing is noted are left out."""
    steps = [step.strip().lower() for step in variant.split("/")]
    return {step: QUALITY[name] for step in steps if (name := step.partition(":")[0]) in QUALITY}
