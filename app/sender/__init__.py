"""The sending side of the binary content binding: sources, authorization, transfer, delivery."""
