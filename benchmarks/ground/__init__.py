"""Evidence on ground like the paper's: classes that no training has seen, colour, small ε."""
