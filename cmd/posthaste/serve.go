package main

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"posthaste/internal/app"
)

type serveCmd struct{}

// Run serves until a signal. On SIGHUP it reads the file of API keys again.
func (serveCmd) Run(ctx context.Context, e *env) error {
	p, err := app.NewServe(ctx, e.config, e.config.Logger())
	if err != nil {
		return err
	}
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	var reload sync.WaitGroup
	reload.Go(func() {
		for range hangup {
			p.ReloadKeys()
		}
	})
	err = p.Run(ctx)
	signal.Stop(hangup)
	close(hangup)
	reload.Wait()
	return err
}
