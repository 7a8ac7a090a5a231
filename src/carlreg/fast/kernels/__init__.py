"""Triton kernels. Importing one of these modules imports Triton."""
