"""Words to blocks: which states may emit which words, and how words are clustered.

`blocks` holds the answer (`Blocks`), `cluster` finds it from a text (`brown`, then `exchange`, both on the counts of
`bigrams`), `assignments` cuts words by frequency, `paths` reads and writes wcluster's files.
"""
