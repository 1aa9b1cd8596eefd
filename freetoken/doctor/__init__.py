"""What is in the way on this machine, with the exact fix for each finding. Repairs nothing by itself."""
