"""Which questions about inference can be answered by looking? Pages that this program computes."""
