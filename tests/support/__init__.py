"""What tests run as tasks and wait with. A package, so that workers in other processes can import it too."""
