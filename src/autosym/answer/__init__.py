"""The answers: how equivariant a model is, as measured, and which model the data support."""
