"""From a store to DataFrames: format `omniq`, as a batch and as a stream."""
