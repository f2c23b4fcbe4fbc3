"""The cases of the conformance suite, one module per topic; `omniq.testing.conformance` loads them all."""
