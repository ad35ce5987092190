"""How do the processes that share one model divide it and talk?"""
