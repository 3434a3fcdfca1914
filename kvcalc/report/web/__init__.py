"""One page to send: a deployment's answers, pictures and sliders in a file that needs no network."""

from kvcalc.report.web.page import Asked, html_page, page_explained

__all__ = ["Asked", "html_page", "page_explained"]
