"""What can be measured. A room an operation, with its shapes, its work, its kernels, its columns and its rules."""
