"""The report: conformance and speed of this machine as one HTML file that needs no network."""
