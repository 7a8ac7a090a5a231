"""Images on disk: training material (`manifest` lists it, `cache` makes it ready, `pairs` draws from it), and the
paper's datasets, one file each, which says what it expects on disk."""
