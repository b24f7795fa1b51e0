"""What identifies a module and the code it runs: equal for equal computation, in every process."""
