"""What a graph cannot say is refused, or made sayable: side effects, steps that depend on earlier ones, sizes of the batch in numbers."""
