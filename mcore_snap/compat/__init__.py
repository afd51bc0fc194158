"""The library under the names that other packages gave to the same job; none of them is imported."""
