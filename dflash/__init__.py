"""DFlash, the method: drafter, attention mask, loss, replay, reference decoder. Pure torch."""
