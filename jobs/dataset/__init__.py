"""What stages read from the work folder: samples with their features, SQL questions answered by
DuckDB, acceptance rows, and slices of the traffic. Every other room may import it; it imports
`base`.
"""
