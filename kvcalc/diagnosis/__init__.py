"""Read start-up logs and metrics of real servers, and compare them with the prediction."""
