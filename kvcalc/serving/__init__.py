"""Times of one request, and simulations of servers under load, from the times of passes."""
