"""The operators, one package each: reference, backends and the public function."""
