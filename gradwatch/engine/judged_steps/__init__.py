"""At which steps what is read and judged.

`stages` has the rules that are not judged yet, as the first step of each is to come. Of rules with `every: N`,
`staggered_reads` gives the sites that are read at a step, `staggered_judging` the series that are judged.
"""
