"""One module per question: score, next word, sample, infill, decode, word posterior, information."""
