"""`memlab.advise`: which techniques save memory here, found by running each of them; `ask.advise` is where it begins."""
