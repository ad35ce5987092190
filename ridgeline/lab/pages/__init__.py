"""What does each page of the lab compute? One module a page: inputs in, an answer out."""
