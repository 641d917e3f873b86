"""Files of others, damaged or made up: every reader refuses them in a sentence, or reads them."""
