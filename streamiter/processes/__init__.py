"""Links between processes, and channels whose ends are in two processes. No public function uses them yet."""
