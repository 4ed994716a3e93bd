// Command posthaste moves events from a Postgres outbox table to Redis Streams. See posthaste --help.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

// Exit codes. They are part of the contract.
const (
	exitFailure  = 1
	exitBadUsage = 2
)

// commandLine is filled in by the parser.
type commandLine struct {
	app.Settings

	Migrate     migrateCmd     `cmd:"" help:"Apply the embedded migrations; safe to run from many places at once."`
	Serve       serveCmd       `cmd:"" help:"Run the API."`
	Relay       relayCmd       `cmd:"" help:"Run the relay."`
	Consume     consumeCmd     `cmd:"" help:"Print one JSON line per event, as a member of a consumer group."`
	Mode        modeCmd        `cmd:"" help:"Show or set the desired mode: auto, cdc or poll."`
	Status      statusCmd      `cmd:"" help:"Show mode, leader, backlog, slot, parked events, and what was lost or restored."`
	Dead        deadCmd        `cmd:"" help:"List, retry or drop parked events."`
	Replay      replayCmd      `cmd:"" help:"Publish history again, marked as replayed; continues where the same command stopped."`
	Streams     streamsCmd     `cmd:"" help:"Delete a stream on purpose."`
	Phantoms    phantomsCmd    `cmd:"" help:"List events that are in streams and not in Postgres since a failover or a restore (the commit is lost, or the row was deleted), or acknowledge them."`
	Audit       auditCmd       `cmd:"" help:"List changes and refused attempts, with the user of each."`
	Groups      groupsCmd      `cmd:"" help:"List or drop consumer groups; an abandoned one keeps streams from being trimmed."`
	Trace       traceCmd       `cmd:"" help:"Follow one id (order, event, or idempotency key) through Postgres, streams and consumer groups."`
	Doctor      doctorCmd      `cmd:"" help:"Check Postgres and Redis before the relay does; every finding names its remedy."`
	Adopt       adoptCmd       `cmd:"" help:"Take over streams last written by another database."`
	Credits     creditsCmd     `cmd:"" help:"Inspect and repair the ledger of credits."`
	Uninstall   uninstallCmd   `cmd:"" help:"Drop the slot and the publication; an abandoned slot fills a disk."`
	Keygen      keygenCmd      `cmd:"" help:"Make an API key and its line for the file of keys: the line goes to standard output, the key to standard error."`
	Healthcheck healthcheckCmd `cmd:"" help:"Ask a running process whether it is healthy; for containers."`
	Version     versionCmd     `cmd:"" help:"Print the version."`
	Bench       benchCmd       `cmd:"" help:"Measure throughput and latency, and compare them with limits measured in the same run."`
	Demo        demoCmd        `cmd:"" help:"Run everything on its own servers and show events arriving."`
	Prove       proveCmd       `cmd:"" help:"Inject faults into the whole product, on its own servers, and verify that every promise is kept."`
	GenDocs     genDocsCmd     `cmd:"" hidden:"" help:"Write the reference of the settings."`

	ProveConsumer proveConsumerCmd `cmd:"" hidden:"" help:"Consume for a campaign of posthaste prove."`
}

// quiet discards the log of the Redis client. The client also returns each of these errors, and the commands report
// them.
type quiet struct{}

// Printf implements the client's logger.
func (quiet) Printf(context.Context, string, ...any) {}

func main() {
	redis.SetLogger(quiet{})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-ctx.Done()
		stop() // a second signal ends the process at once
	}()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program, with arguments and streams as parameters.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	var line commandLine
	exited := -1
	parser, err := kong.New(&line, kong.Name("posthaste"), kong.UsageOnError(),
		kong.Description("A transactional outbox: Postgres to Redis Streams, by the write-ahead log or by sweeping."),
		kong.Writers(stdout, stderr), kong.Exit(func(code int) { exited = code }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}), kong.Help(help))
	if err != nil {
		fmt.Fprintln(stderr, "posthaste:", err)
		return exitFailure
	}
	kctx, err := parser.Parse(args)
	if exited >= 0 {
		return exited // --help
	}
	if err != nil {
		fmt.Fprintf(stderr, "posthaste: %v (see posthaste --help)\n", err)
		return exitBadUsage
	}
	line.Given = flagsOf(kctx)
	settings := line.Settings
	if kctx.Command() == "healthcheck" {
		settings = settings.OfAdminListener()
	}
	config, err := settings.Parse()
	if err != nil {
		for _, fault := range faults(err) {
			fmt.Fprintln(stderr, "posthaste:", fault)
		}
		return exitBadUsage
	}
	config.Version = version
	line.WarnOfSecrets(config.Logger())
	e := &env{IO: cli.IO{Stdin: stdin, Stdout: stdout, Stderr: stderr}, config: config, model: parser.Model}
	kctx.BindTo(ctx, (*context.Context)(nil))
	err = kctx.Run(e)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, cli.ErrSaid):
		return exitFailure
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		err = errors.New("interrupted")
	}
	fmt.Fprintln(stderr, "posthaste:", ops.Printable(err.Error())+cli.Remedy(err))
	var usage *cli.UsageError
	if errors.As(err, &usage) {
		return exitBadUsage
	}
	return exitFailure
}

// flagsOf returns the names of the flags that were given on the command line.
func flagsOf(kctx *kong.Context) (names []string) {
	for _, p := range kctx.Path {
		if p.Flag != nil && !p.Resolved {
			names = append(names, p.Flag.Name)
		}
	}
	return names
}

// faults returns the errors that a joined error consists of.
func faults(err error) []error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return j.Unwrap()
	}
	return []error{err}
}
