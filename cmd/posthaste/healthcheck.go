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
	"posthaste/internal/tlsfile"
)

type healthcheckCmd struct {
	Ready bool   `help:"Ask /readyz (can it do its work?) instead of /healthz (does it run?)."`
	Addr  string `help:"Admin address to ask. Default: the admin address of the settings, or of serve."`
	Cert  string ` env:"POSTHASTE_HEALTHCHECK_CERT"`
	Key   string `help:"PEM file with its key." env:"POSTHASTE_HEALTHCHECK_KEY"`
}

// Run queries a process on this machine. It uses HTTPS if the settings configure a certificate for its admin listener.
// Like the probes of Kubernetes, it does not verify the certificate: it sends no secret, and the certificate need not
// be valid for 127.0.0.1.
func (c healthcheckCmd) Run(ctx context.Context, e *env) error {
	addr, err := c.address(e.config)
	if err != nil {
		return err
	}
	scheme, client := "http", &http.Client{}
	if e.config.AdminTLS != nil {
		files, err := c.files(e.config)
		if err != nil {
			return err
		}
		scheme = "https"
		client.Transport = &http.Transport{
			DialTLSContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				return files.Dial(ctx, network, addr, true)
			},
		}
	}
	path := "/healthz"
	if c.Ready {
		path = "/readyz"
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+addr+path, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
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

// address returns the address to query.
func (c healthcheckCmd) address(config app.Config) (string, error) {
	addr := c.Addr
	if addr == "" {
		addr = config.AdminAddr
	}
	if addr == "" {
		addr = app.DefaultServeAdmin
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", cli.Usage(fmt.Sprintf("address %q: %v", addr, err))
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1" // the process listens on all addresses
	}
	return net.JoinHostPort(host, port), nil
}

// files returns the client certificate to present.
func (c healthcheckCmd) files(config app.Config) (*tlsfile.Files, error) {
	if c.Cert == "" && c.Key == "" {
		return config.AdminTLS, nil
	}
	if c.Cert == "" || c.Key == "" {
		return nil, cli.Usage("--cert and --key need each other")
	}
	files, err := tlsfile.Load(tlsfile.Names{Cert: c.Cert, Key: c.Key})
	if err != nil {
		return nil, cli.Usage(err.Error())
	}
	return files, nil
}
