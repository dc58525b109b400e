"""Does `gw.healthy` tell checkpoints that are worth keeping from those that are lost?"""
