"""How are the next tokens drafted, and how are drafts checked? One file per draft method."""
