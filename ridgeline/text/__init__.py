"""How does text become tokens and tokens text: vocabularies, chats, streams, stop strings."""
