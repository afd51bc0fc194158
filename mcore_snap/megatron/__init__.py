"""The only part that knows Megatron-Core; it goes by what objects have and never imports it."""
