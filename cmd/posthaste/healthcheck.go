package main

import (
	"context"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/tlsfile"
)

type healthcheckCmd struct {
	URL   string `arg:"" optional:"" help:"Admin listener to ask, as a URL or as host:port."`
	Ready bool   `help:"Ask /readyz (can it do its work?) instead of /healthz (does it run?)."`
	Addr  string // see help.txt
	Cert  string ` env:"POSTHASTE_HEALTHCHECK_CERT"`
	Key   string `help:"PEM file with its key." env:"POSTHASTE_HEALTHCHECK_KEY"`
}

// Run queries a process, by default one on this machine.
func (c healthcheckCmd) Run(ctx context.Context, e *env) error {
	if c.URL != "" && c.Addr != "" {
		return cli.Usage("give the address once: as an argument, or as --addr")
	}
	h := app.Healthcheck{Addr: c.URL + c.Addr, Ready: c.Ready, Client: tlsfile.Names{Cert: c.Cert, Key: c.Key}}
	return h.Do(ctx, e.config, e.Stdout)
}
