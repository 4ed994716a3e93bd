package main

import "context"

type demoCmd struct{}

func (demoCmd) Run(ctx context.Context, e *env) error { return nil }
