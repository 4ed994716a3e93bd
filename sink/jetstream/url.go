package jetstream

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
)

// ParseURL splits the addresses of servers, separated by commas, from the files with credentials that their
// parameters name: creds=FILE, or nkey=FILE with a seed.
func ParseURL(addresses string) (servers string, options []nats.Option, err error) {
	var list []string
	for _, address := range strings.Split(addresses, ",") {
		u, err := url.Parse(strings.TrimSpace(address))
		if err != nil || !slices.Contains([]string{"nats", "tls"}, u.Scheme) || u.Host == "" {
			return "", nil, errors.New("an address is nats://host:port or tls://host:port")
		}
		for name, values := range u.Query() {
			switch name {
			case "creds":
				options = append(options, nats.UserCredentials(values[0]))
			case "nkey":
				option, err := nats.NkeyOptionFromSeed(values[0])
				if err != nil {
					return "", nil, fmt.Errorf("the seed of nkey: %w", err)
				}
				options = append(options, option)
			default:
				return "", nil, fmt.Errorf("parameters of an address are creds and nkey, not %s", name)
			}
		}
		u.RawQuery = ""
		list = append(list, u.String())
	}
	return strings.Join(list, ","), options, nil
}
