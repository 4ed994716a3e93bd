// Command peers compares posthaste with its alternatives, on the same servers and in the same run. It starts a
// Postgres and a Redis that are durable as in production. In each round, every load runs with every peer in turn,
// each with an empty database and an empty Redis, and each round begins with another peer.
//
//	peers [--rounds=3] [--seconds=10] [--backlog=100000] [--rates=2000,5000,0] [--peers=…] [--json]
//
// `make bench-peers` calls it. Every peer is a process of its own, so that its processor time is measured apart from
// that of the servers and of the load; peers that are libraries are this program again, called with "peer" and a
// name.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/bench"
	"posthaste/internal/cli"
	"posthaste/internal/lab/local"
)

// quiet is a log for go-redis, which would say that a server that starts does not answer yet.
type quiet struct{}

// Printf implements the logger of go-redis.
func (quiet) Printf(context.Context, string, ...any) {}

func main() {
	redis.SetLogger(quiet{})
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], cli.IO{Stdout: os.Stdout, Stderr: os.Stderr})
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

// run is the program without its process.
func run(ctx context.Context, args []string, o cli.IO) error {
	if len(args) > 0 && args[0] == "peer" {
		return child(ctx, args[1:])
	}
	p := &programs{}
	b, err := p.parse(args, o)
	if err != nil {
		return err
	}
	if p.self, err = os.Executable(); err != nil {
		return err
	}
	if b.PGBin, err = local.PostgresBin(ctx, b.PGBin); err != nil {
		return err
	}
	p.postgres = b.PGBin
	own, err := exec.CommandContext(ctx, p.posthaste, "version").Output()
	if err != nil {
		return fmt.Errorf("no program posthaste: run make build, or name it in --posthaste: %w", err)
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, m := range build.Deps {
			if name := strings.TrimPrefix(m.Path, "github.com/"); strings.HasPrefix(name, "ThreeDotsLabs/") ||
				name == "jackc/pglogrepl" {
				b.Versions[name] = m.Version
			}
		}
	}
	return b.Run(ctx, app.Config{Version: strings.TrimPrefix(strings.TrimSpace(string(own)), "posthaste ")}, o)
}

// parse reads the command line.
func (p *programs) parse(args []string, o cli.IO) (b bench.Peers, err error) {
	b = bench.Peers{Stream: stream, Versions: map[string]string{}}
	b.PGBin, b.RedisBin = os.Getenv("POSTHASTE_PG_BIN"), os.Getenv("POSTHASTE_REDIS_BIN")
	flags := flag.NewFlagSet("peers", flag.ContinueOnError)
	flags.SetOutput(o.Stderr)
	flags.IntVar(&b.Runs, "rounds", 3, "how often everything is measured")
	seconds := flags.Float64("seconds", 10, "how long a load at a rate lasts")
	flags.IntVar(&b.Backlog, "backlog", 100_000, "events that wait when a peer starts; 0 leaves this load out")
	rates := flags.String("rates", "2000,5000,0",
		"transactions of one event `per second`; 0: as many as 16 connections can")
	names := namesOf(p.peers())
	chosen := flags.String("peers", strings.Join(names, ","), "the peers to be `measured`")
	flags.IntVar(&b.Size, "size", 300, "bytes of an event's payload")
	flags.StringVar(&b.Dir, "dir", "", "`folder` for the servers' data, on the disk to be measured")
	flags.StringVar(&p.posthaste, "posthaste", "../bin/posthaste", "the `program` posthaste")
	flags.BoolVar(&b.JSON, "json", false, "print JSON instead of tables")
	if err := flags.Parse(args); err != nil {
		return b, err
	}
	if b.Runs < 1 || b.Backlog < 0 || b.Size < 100 || *seconds <= 0 || flags.NArg() > 0 {
		return b, errors.New("--rounds must be at least 1, --size 100, --seconds above 0, and nothing may follow")
	}
	b.Lasts = time.Duration(*seconds * float64(time.Second))
	for r := range strings.SplitSeq(*rates, ",") {
		rate, err := strconv.ParseFloat(r, 64)
		if r != "" && (err != nil || rate < 0) {
			return b, fmt.Errorf("--rates: %q is not a number of transactions a second", r)
		}
		if r != "" {
			b.Rates = append(b.Rates, rate)
		}
	}
	for name := range strings.SplitSeq(*chosen, ",") {
		if !slices.Contains(names, name) {
			return b, fmt.Errorf("--peers: %q is not one of %s", name, strings.Join(names, ", "))
		}
	}
	b.Peers = choose(p.peers(), strings.Split(*chosen, ","))
	return b, nil
}
