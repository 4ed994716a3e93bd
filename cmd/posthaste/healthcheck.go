package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/cli"
)

type healthcheckCmd struct {
	Ready bool   `help:"Ask /readyz (can it do its work?) instead of /healthz (does it run?)."`
	Addr  string `help:"Admin address to ask. Default: the admin address of the settings, or of serve."`
}

// Run asks a process on this machine.
func (c healthcheckCmd) Run(ctx context.Context, e *env) error {
	addr := c.Addr
	if addr == "" {
		addr = e.config.AdminAddr
	}
	if addr == "" {
		addr = app.DefaultServeAdmin
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return cli.Usage(fmt.Sprintf("address %q: %v", addr, err))
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1" // it listens everywhere, here too
	}
	path := "/healthz"
	if c.Ready {
		path = "/readyz"
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
	fmt.Fprintf(e.Stdout, "%d %s\n", resp.StatusCode, strings.TrimSpace(string(body)))
	if resp.StatusCode != http.StatusOK {
		return cli.ErrSaid
	}
	return nil
}
