"""How are the next tokens guessed, and how are guesses checked? One file per draft method."""
