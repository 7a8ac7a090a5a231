"""`carl evaluate`: how good results are, ours and other methods'."""
