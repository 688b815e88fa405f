"""How the two tiny models that Trivet ships are made: grammar, text, tokenizer, training, evaluation."""
