"""Random programs of TIR."""
