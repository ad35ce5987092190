"""How does a model become smaller, layer by layer, and what does that cost in quality?"""
