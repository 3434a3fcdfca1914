"""Read start-up logs of real servers and compare them with the prediction."""
