module relax_grad/examples/go_trainer

go 1.18
