package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"posthaste/internal/cli"
	"posthaste/internal/socket"
	"posthaste/internal/tlsfile"
)

// Healthcheck is the command that asks a running process, by default one on this machine, for its health.
type Healthcheck struct {
	URL   string `arg:"" optional:"" help:"Admin listener to ask, as a URL or as host:port."`
	Ready bool   `help:"Ask /readyz (can it do its work?) instead of /healthz (does it run?)."`
	Addr  string // see help.txt
	Cert  string ` env:"POSTHASTE_HEALTHCHECK_CERT"`
	Key   string `help:"PEM file with its key." env:"POSTHASTE_HEALTHCHECK_KEY"`
}

// Run prints the answer of the first process that answers. Without an address, those of the settings are asked, else
// the default ones of serve and relay. It uses HTTPS if the address or the certificate of the admin listener in the
// settings requires it. Like the probes of Kubernetes, it does not verify the certificate: it sends no secret, and the
// certificate need not be valid for 127.0.0.1. An answer other than 200 is cli.ErrSaid.
func (h Healthcheck) Run(ctx context.Context, c Config, o cli.IO) error {
	if h.URL != "" && h.Addr != "" {
		return cli.Usage("give the address once: as an argument, or as --addr")
	}
	files, err := h.files(c)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialTLSContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return files.Dial(ctx, network, addr, true)
		},
	}}
	addrs := []string{defaultServeAdmin, defaultRelayAdmin}
	if one := h.URL + h.Addr; one != "" {
		addrs = []string{one}
	} else if c.AdminAddr != "" {
		addrs = []string{c.AdminAddr}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var silent []string
	for _, addr := range addrs {
		target, err := h.url(addr, c.AdminTLS != nil)
		if err != nil {
			return err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			why := socket.Failure(err)
			if of, ok := errors.AsType[*url.Error](err); ok && why == "" {
				why = of.Err.Error() // without the URL
			}
			silent = append(silent, req.URL.Redacted()+" "+why)
			continue
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		_, _ = fmt.Fprintf(o.Stdout, "%d %s\n", resp.StatusCode, strings.TrimSpace(string(body)))
		if resp.StatusCode != http.StatusOK {
			return cli.ErrSaid
		}
		return nil
	}
	return fmt.Errorf("%s: start the process, or pass the address of its admin listener (posthaste healthcheck "+
		"http://HOST:PORT, or --admin-addr)", strings.Join(silent, ", and "))
}

// url returns what is asked at an address. An address without a host, or with one that stands for all, is this
// machine's.
func (h Healthcheck) url(addr string, secure bool) (string, error) {
	u := &url.URL{Scheme: "http", Host: addr}
	if secure {
		u.Scheme = "https"
	}
	var err error
	if strings.Contains(addr, "://") {
		u, err = url.Parse(addr)
	} else {
		_, _, err = net.SplitHostPort(addr)
	}
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", cli.Usage("an address of healthcheck is host:port, or http://host:port")
	}
	if ip := net.ParseIP(u.Hostname()); u.Hostname() == "" || ip != nil && ip.IsUnspecified() {
		u.Host = net.JoinHostPort("127.0.0.1", u.Port())
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = map[bool]string{false: "/healthz", true: "/readyz"}[h.Ready]
	}
	return u.String(), nil
}

// files returns the client certificate to present: by default that of the admin listener.
func (h Healthcheck) files(c Config) (*tlsfile.Files, error) {
	names := tlsfile.Names{Cert: h.Cert, Key: h.Key}
	if !names.Any() && c.AdminTLS != nil {
		return c.AdminTLS, nil
	}
	files, err := tlsfile.Load(names)
	if err != nil {
		return nil, cli.Usage("--cert, --key: " + err.Error())
	}
	return files, nil
}
