"""How well does a model do what it should? Scores on problems with known answers."""
