"""Small bugs that are planted into the code one at a time: each must be caught by a test."""
