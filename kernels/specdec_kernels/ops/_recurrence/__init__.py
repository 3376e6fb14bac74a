"""What operators of recurrent layers share: packed nodes, gates and the arguments that all of them check."""
