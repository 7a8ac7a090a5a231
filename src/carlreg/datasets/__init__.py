"""Lists of images and pairs, and the paper's datasets: one file each, which says what it expects on disk."""
