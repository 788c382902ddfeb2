"""Lightning's own examples and tests, and litgpt's scripts, from checkouts that the user names, with our strategy."""
