"""The frontier of candidates, the incumbent, the certificate; several processes; samplers."""
